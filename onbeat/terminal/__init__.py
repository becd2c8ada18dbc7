"""Everything that `onbeat` draws in a terminal, and the report it writes. Only the command line imports it.

`follow` is `onbeat run` and `onbeat jobs watch`: `job_progress` is what it knows of a job, `job_view` how that looks.
`top` is `onbeat top`. Both are drawn by `live`. `summary` and `report` are for a job that is over.
"""
