-- KEYS: job, events, prompts, rollouts, deleted. ARGV: job id, digest of the configuration (hex), consumer groups of the
-- two streams, then field/value pairs, which go before the defaults. Creates a PENDING job once.
-- Returns created | exists | deleted.
local prompts, rollouts, deleted = KEYS[3], KEYS[4], KEYS[5]
local job_id, digest, rollout_consumers, trainer_consumers = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local fields = slice(ARGV, 5)
if redis.call('EXISTS', job) == 1 then return 'exists' end
if redis.call('EXISTS', deleted) == 1 then return 'deleted' end
local created = now()
redis.call('XGROUP', 'CREATE', prompts, rollout_consumers, '0', 'MKSTREAM')
redis.call('XGROUP', 'CREATE', rollouts, trainer_consumers, '0', 'MKSTREAM')
redis.call('HSET', job, 'id', job_id, 'state', 'PENDING', 'created_at', created, 'progress_at', created,
  'num_opened', '0', 'next_iteration', '0', 'epoch', '0', unpack(fields))
if field('first_iteration') then
  record('created', job_id, digest, field('first_iteration'))
else
  record('created', job_id, digest)
end
emit('job.state', 'PENDING', {state = 'PENDING'})
return 'created'
