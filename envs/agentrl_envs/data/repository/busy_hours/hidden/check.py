from hours import free, merged


def show(call):
    try:
        print(repr(call()))
    except Exception as error:
        print(type(error).__name__)


show(lambda: merged([(9, 12), (10, 11), (11, 13)]))
show(lambda: merged([(9, 10), (10, 11)]))
show(lambda: merged([(14, 15), (9, 11), (10, 12)]))
show(lambda: merged([(9, 17), (10, 11), (12, 13)]))
show(lambda: merged([]))
show(lambda: merged([(9, 10), (11, 12)]))
show(lambda: free([(9, 12), (10, 11)]))
show(lambda: free([(15, 16), (9, 10)]))
show(lambda: free([]))
show(lambda: free([(9, 17)]))
