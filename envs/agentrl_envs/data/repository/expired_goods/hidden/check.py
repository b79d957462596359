from datetime import date

from store.goods import Good
from store.shelf import remove_expired


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


def names_after(*days):
    shelf = [Good(f"{number}", f"2024-06-{day:02d}") for number, day in enumerate(days)]
    same = shelf
    removed = remove_expired(shelf, date(2024, 6, 15))
    return [good.name for good in removed], [good.name for good in shelf], shelf is same


show(lambda: names_after(1, 2, 20))
show(lambda: names_after(1, 2, 3, 4, 5))
show(lambda: names_after(20, 3, 3, 21, 4, 5, 6))
show(lambda: names_after(14, 15, 16))
show(lambda: names_after())
show(lambda: names_after(20, 21))
show(lambda: Good("milk", "2024-06-15").has_expired(date(2024, 6, 15)))
show(lambda: Good("milk", "2024-06-14"))
