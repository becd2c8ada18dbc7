"""The `onbeat` command. Its modules take a moment to load, and Ctrl-C in that moment is no defect to show."""

import signal


def main() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise in the background of a script: Ctrl-C is not for us
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a word
    from onbeat.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()
