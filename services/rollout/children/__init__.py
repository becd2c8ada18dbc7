"""Child processes that run foreign code beside the engine: rewards and environments.

process    the parent's side: start, lines of JSON, the end of stderr, SIGKILL
answers    the parent's side: what it reads from a child, checked like untrusted input
limits     the child's side: the streams of the protocol, and the limits that it sets on itself
"""
