from shop.cart import Cart


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


ann, bob = Cart("ann"), Cart("bob")
ann.add("milk", 2)
show(lambda: (ann.total(), bob.total()))
show(lambda: (ann.items, bob.items))
show(lambda: Cart("cy").total())
usual = ["bread", "milk"]
dora = Cart("dora", usual)
dora.add("apple")
show(lambda: usual)
show(lambda: (dora.items, dora.total()))
show(lambda: Cart("eve", ["gold"]).total())
