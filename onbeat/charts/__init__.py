"""Charts of a job: one table says what they are, and SVG shows them where there is no dashboard.

table.json    colours, dashes, groups, titles, units and series; the dashboard's scripts read the same file
table.py      the table for Python, and the lines of a chart among a job's series
scale.py      ranges and ticks of axes, and numbers in words
svg.py        a chart as a piece of HTML without scripts, for `onbeat report` and notebooks
"""
