-- ARGV: epoch, digest (hex). The first record stays: every trainer of the job must have this teacher. Returns the recorded
-- digest, or nil when the lease was lost.
local epoch, digest = ARGV[1], ARGV[2]
if not is_owner(epoch) then return nil end
if redis.call('HSETNX', job, 'teacher_digest', digest) == 1 then
  record('teacher', digest)
  emit('job.teacher', 'the teacher has the digest ' .. digest, {digest = digest})
end
return field('teacher_digest')
