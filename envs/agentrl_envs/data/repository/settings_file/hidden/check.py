from settings import read_settings


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


show(lambda: read_settings("host = localhost\nport=8080 # not 80"))
show(lambda: read_settings("url = http://host/?a=1&b=2"))
show(lambda: read_settings('title = "the #1 shop"'))
show(lambda: read_settings('title = "the #1 shop" # "best" of all'))
show(lambda: read_settings('padded = "  two  "\nempty = ""\nnone ='))
show(lambda: read_settings("# nothing\n\n   # here"))
show(lambda: read_settings("a = 1\na = 2"))
for text in ("no sign", "a = 1\n\nno sign # = here\n"):
    try:
        print(read_settings(text))
    except ValueError as error:
        print([number for number in range(1, 5) if f"line {number}" in str(error)])
