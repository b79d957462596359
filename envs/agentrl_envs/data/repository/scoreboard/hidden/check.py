from scoreboard import board


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


show(lambda: board("ann: 9\nbob: 10\ncy: 100"))
show(lambda: board("zoe: 5\nann: 5\nmia: 5"))
show(lambda: board("zoe: 7\nbob: 7\nann: 12\ncy: 3"))
show(lambda: board("ann: -3\nbob: 0\ncy: -10"))
show(lambda: board(""))
show(lambda: board("ann: 10\nbob: 20"))
