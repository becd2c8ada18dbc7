"""The `onbeat` command. Its modules take a moment to load, and Ctrl-C in that moment is no defect to show."""

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a word
        from onbeat.cli import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:  # in the background of a script: Ctrl-C is not for us
        from onbeat.cli import main as run
    run()
