from duration import read, write


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


for text in ("90m", "1h30m", "45s", "2h", "1h5s", "3m20s", "1h2m3s", "0s", "100m100s"):
    show(lambda: read(text))
for text in ("", "1", "1m1h", "-1s", "1h 2m", "h"):
    show(lambda: read(text))
for seconds in (0, 1, 60, 61, 3600, 3605, 5400, 3723, 360000):
    show(lambda: write(seconds))
