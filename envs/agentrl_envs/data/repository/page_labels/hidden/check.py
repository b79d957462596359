from catalog.pages import label, num_pages, page


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


for num_items in (0, 1, 9, 10, 11, 20, 25):
    show(lambda: num_pages(num_items, 10))
for number in (1, 2, 3):
    show(lambda: label(number, 25, 10))
show(lambda: label(1, 1, 5))
show(lambda: label(2, 8, 4))
show(lambda: [page("abcdefg", number, 3) for number in range(1, num_pages(7, 3) + 1)])
