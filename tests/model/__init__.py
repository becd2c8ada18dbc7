"""The scripts, model-checked: every order in which the services can call them, in a small job, on a real Redis.

    store       states of the job in Redis: one call of the ledger leads from one to another, each tried once
    actors      what rollouts, brokers, trainers, a user and time may do next
    invariants  what must hold in each state and along each call
    search      breadth first over all of it; the shortest trace to a violation; whether every state can still end

`python -m tests.model` runs the larger bounds, `test_protocol.py` the smaller ones and the mutants.
"""
