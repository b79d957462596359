from sales.report import report
from sales.rows import rows


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


show(lambda: report("seller,amount\nbob,3\nann,1"))
show(lambda: report("seller,amount\nbob,2\nann,4\nbob,2"))
show(lambda: list(rows('seller,amount\n"Smith, Ann",12.50\n"Lee, Bo",7.5')))
show(lambda: report('seller,amount\n"Smith, Ann",12.50\nBob,12.50'))
show(lambda: list(rows('seller,amount\n"The ""big"" one",1')))
show(lambda: report("seller,amount\n"))
show(lambda: report("seller,amount\nann,many"))
