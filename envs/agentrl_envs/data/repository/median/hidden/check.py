from summary import mean, median, spread


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


show(lambda: float(median([4, 1, 3, 2])))
show(lambda: float(median([10, 20])))
show(lambda: float(median([9, 7, 8])))
show(lambda: float(median([5])))
show(lambda: float(median((3, 1, 2))))
for function in (mean, median, spread):
    show(lambda: function([]))
values = [3, 1, 2, 5]
show(lambda: float(median(values)))
show(lambda: values)
