"""The doctor, which says what waits for what, since when, and what happens next. It only reads.

diagnosis    the whole installation
explain      one job: its trainer, rollouts and prompts, from its `situation`
learning     whether the job learns, and which key to change if it does not
memory       machines that run out of memory
"""
