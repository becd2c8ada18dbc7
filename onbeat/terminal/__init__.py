"""The terminal output of `onbeat`, and the report it writes. Only the command line imports it.

`follow` is `onbeat run` and `onbeat jobs watch`: `job_progress` is the data of a job, `job_view` shows it. `top` is
`onbeat top`. Both are drawn by `live`. `summary` and `report` are for a job that is over.
"""
