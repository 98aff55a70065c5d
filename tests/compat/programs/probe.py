"""Prints, as JSON, what a program can see of how it runs; then ends as its first argument says."""

import atexit
import builtins
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback


class Value:
    """Is pickled by name, as a class of `__main__`."""

    def __init__(self, number: int) -> None:
        self.number = number


def send_value(queue) -> None:
    main = sys.modules["__main__"]
    queue.put((Value(3), main is sys.modules["__mp_main__"], main.__name__, main.__file__))


def start_child() -> list[object]:
    """Returns what a spawned process says, and whether what it sends is an instance of the class here."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=send_value, args=(queue,))
    process.start()
    value, *others = queue.get()
    process.join()
    return [type(value) is Value, value.number, process.exitcode, *others]


def seen() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "executable": sys.executable,
        "flags": str(sys.flags),
        "warnings": sys.warnoptions,
        "options": str(sys._xoptions),
        "names": sorted(vars(main)),
        "is main": vars(main) is globals(),
        "has a main of multiprocessing": "__mp_main__" in sys.modules,
        "name": __name__,
        "file": globals().get("__file__"),
        "cached": globals().get("__cached__"),
        "doc": __doc__,
        "package": __package__,
        "spec": __spec__ and (__spec__.name, __spec__.origin, __spec__.parent),
        "loader": type(globals()["__loader__"]).__name__,
        "builtins": __builtins__ is builtins,
        "pickled": pickle.loads(pickle.dumps(Value(1))).number,
        "class": str(Value),
        "frames": [frame.filename for frame in traceback.extract_stack()],
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": [each.name for each in threading.enumerate()],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "hook": sys.excepthook is sys.__excepthook__,
        "imported": [name for name in ("torch", "gradwire", "click", "numpy") if name in sys.modules],
    }


def use_program(when: str) -> None:
    """Uses the program's module, at a time when its code has ended."""
    main = sys.modules["__main__"]
    print(when, Value(4).number, main.Value is Value, pickle.loads(pickle.dumps(Value(5))).number, flush=True)


def use_after_main_thread() -> None:
    threading.main_thread().join()
    use_program("after the main thread")


def end(how: str) -> None:
    atexit.register(use_program, "at exit")
    match how:
        case "thread":
            threading.Thread(target=use_after_main_thread).start()
        case "text":
            sys.exit("a text")
        case "status":
            sys.exit(7)
        case "error":
            raise ValueError("an error")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "child":
            print(json.dumps(start_child()), flush=True)


if __name__ == "__main__":
    print(json.dumps(seen(), indent=1), flush=True)
    end(sys.argv[1])
