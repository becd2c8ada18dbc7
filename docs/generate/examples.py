"""One example for each section of a job. Tests put each into the quick start's file and validate it."""

EXAMPLES = {
    "model": """
[model]
path = "bundled:smollm2-135m-instruct"
max_context_tokens = 1024
""",
    "lora": """
[lora]
rank = 16
target_modules = ["q_proj", "v_proj"]
""",
    "data": """
[data]
type = "jsonl"
path = "questions.jsonl"
prompt_field = "question"
system_prompt = "Answer with a number."
""",
    "reward": """
[reward]
name = "regex"
options = { pattern = '(-?\\d+)' }
timeout_s = 5.0
""",
    "rollout": """
[rollout]
num_prompts_per_iteration = 64
num_samples_per_prompt = 8
max_response_tokens = 1024
on_group_failure = "fail"
""",
    "objective": """
[objective]
type = "grpo"
clip_high = 0.28
kl = { coef = 0.001, estimator = "k3" }
importance = { type = "truncated", cap = 2.0 }
""",
    "optimizer": """
[optimizer]
learning_rate = 1e-6
num_warmup_iterations = 5
""",
    "gac": """
[gac]
mode = "control"
c_low = 0.3
""",
    "training": """
[training]
max_tokens_per_micro_batch = 8192
has_gradient_checkpointing = true
""",
    "schedule": """
[schedule]
mode = "bounded"
num_iterations = 200
max_staleness = 2
""",
    "checkpoint": """
[checkpoint]
every_iterations = 20
keep = 3
""",
    "retention": """
[retention]
rollout_iterations = 100
""",
    "evaluation": """
[evaluation]
every_iterations = 10
num_prompts = 16
data = { type = "reasoning_gym", task = "chain_sum" }
""",
    "tracking": """
[[tracking]]
type = "mlflow"
project = "arithmetic"
""",
}
