-- KEYS: job, events, prompts, rollouts, deleted, pending jobs of the submitter, outcomes before. ARGV: job id, digest of the
-- configuration (hex), consumer groups of the two streams, limit of the pending jobs ('': none), what a fork knows of its
-- parent's rows ('': nothing), then field/value pairs, which go before the defaults. Creates a PENDING job once, and counts
-- it among the submitter's.
-- Returns created | exists | deleted | full.
local prompts, rollouts, deleted, pending = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local job_id, digest, rollout_consumers, trainer_consumers, limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local outcomes_before, outcomes = KEYS[7], ARGV[6]
local fields = slice(ARGV, 7)
if redis.call('EXISTS', job) == 1 then return 'exists' end
if redis.call('EXISTS', deleted) == 1 then return 'deleted' end
if is_full(pending, limit) then return 'full' end
local created = now()
redis.call('ZADD', pending, 'NX', created, job_id)
redis.call('XGROUP', 'CREATE', prompts, rollout_consumers, '0', 'MKSTREAM')
redis.call('XGROUP', 'CREATE', rollouts, trainer_consumers, '0', 'MKSTREAM')
redis.call('HSET', job, 'id', job_id, 'state', 'PENDING', 'created_at', created, 'progress_at', created,
  'num_opened', '0', 'next_iteration', '0', 'epoch', '0', unpack(fields))
if outcomes ~= '' then redis.call('HSET', outcomes_before, 'rows', outcomes) end
if field('first_iteration') then
  record('created', job_id, digest, field('first_iteration'))
else
  record('created', job_id, digest)
end
emit('job.state', 'PENDING', {state = 'PENDING'})
return 'created'
