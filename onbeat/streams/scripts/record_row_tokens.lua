-- ARGV: epoch, tokens of a packed row, the reason for them. The first record stays: every trainer of the job, and every
-- replay, packs rows of so many. Returns the recorded number, or nil when the lease was lost.
local epoch, num_tokens, reason = ARGV[1], ARGV[2], ARGV[3]
if not is_owner(epoch) then return nil end
if redis.call('HSETNX', job, 'max_tokens_per_micro_batch', num_tokens) == 1 then
  emit('job.row_tokens', reason, {max_tokens_per_micro_batch = num_tokens})
end
return field('max_tokens_per_micro_batch')
