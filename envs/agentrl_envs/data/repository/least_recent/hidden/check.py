from recent import Cache


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


def after(room, actions):
    cache, got = Cache(room), []
    for action in actions.split():
        if len(action) == 1:
            got.append(cache.get(action, "-"))
        else:
            cache.put(action[0], action[1:])
    return got, cache.keys()


show(lambda: after(2, "a1 b2 a c3"))
show(lambda: after(2, "a1 b2 a3 a b"))
show(lambda: after(2, "a1 b2 a3 c4"))
show(lambda: after(3, "a1 b2 c3 a x b d4 c"))
show(lambda: after(1, "a1 a2 a b3 a b"))
show(lambda: after(2, "a1 b2 c3"))
show(lambda: after(2, "a a1"))
