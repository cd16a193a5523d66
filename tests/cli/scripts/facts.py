"""What a script can find out about how it was started; it fails with a chain of exceptions in the end."""

import multiprocessing
import sys


def in_child(queue):
    queue.put((__name__, sys.argv, sorted(name for name in sys.modules if name.startswith(("torch", "typer")))))


def fail():
    try:
        {}["first"]
    except KeyError as error:
        raise ValueError("second") from error


if __name__ == "__main__":
    print(sys.argv, sys.path[0], __file__, __spec__ and __spec__.name, __package__, __doc__[:4], sorted(globals()))
    print(sys.modules["__main__"].fail is fail, sys.excepthook is sys.__excepthook__, "numpy" in sys.modules)
    print(sys.stdin.read())
    if __spec__ is None or __spec__.name != "__main__":  # children of a folder that is run cannot find it
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        child = context.Process(target=in_child, args=(queue,))
        child.start()
        print(queue.get())
        child.join()
    fail()
