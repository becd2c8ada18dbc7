-- ARGV: what engine and trainer share: cores | accelerators | nothing. The newest record stays, also of a job that is over.
local sharing = ARGV[1]
if field('state') then redis.call('HSET', job, 'sharing', sharing) end
