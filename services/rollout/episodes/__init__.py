"""Episodes: responses that an environment draws in several calls of the policy, recorded token by token.

recorder    the turns of an episode, as the engine saw and sampled them
rendering   the next prompt: what was sampled stays, and only what is new is rendered
toolcalls   calls of tools in the text of an answer
server      the HTTP server that environments call
runner      one group: all of its episodes side by side, and those that failed again
contract    what the runner asks of the processes that environments run in
"""
