"""The admission of jobs: what is checked before one is created, forked or resumed. Every refusal names a field and a
remedy.

review          the checks of a new job beyond its schema; it asks `models` and `rewards`
ledger_checks   those against the ledger: the checkpoint that a fork starts from, the trackers that the trainers have
resume          jobs that are over and wait for a trainer again
quota           pending jobs of each API key
"""
