"""Each bad recipe with its whole line. The recipe is bad.toml."""

# A table is read by its columns: one row, one line.
# fmt: off
# ruff: noqa: E501

MEND = "mend it there (strings take quotes, numbers none)"
SECTIONS = "seed, model, tasks, devices, rollout, buffer, train, sft, eval, checkpoint, log"
ALGORITHMS = "'grpo', 'dapo', 'dr_grpo', 'rloo', 'reinforce++', 'gspo', 'cispo', 'a3po', 'areal' or 'ppo'"
OPTION = "must be a name with text, a number, true, false or a list; {} is the default (bad.toml)"

BAD_FILES = [
    ('[model]\npath = tiny', f'recipe = "bad.toml": is not valid TOML: Invalid value (at line 2, column 8); {MEND}'),
    ('seed = ' + '9' * 5000, f'recipe = "bad.toml": is not valid TOML: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; {MEND}'),
    ('x = ' + '[' * 3000, f'recipe = "bad.toml": is not valid TOML: maximum recursion depth exceeded; {MEND}'),
    ('extends = "nowhere.toml"', 'extends = "nowhere.toml": cannot be read (No such file or directory); name a TOML file, such as recipes/smoke.toml (bad.toml)'),
    ('extends = "bad.toml"', 'extends = "bad.toml": recipes extend each other in a circle; take one of these lines out (bad.toml)'),
    ('extends = "a\\u0000b"', f'extends = "a\\u0000b": is not valid TOML: embedded null byte; {MEND} (bad.toml)'),
    ('[trian]\nlr = 1e-5', 'trian.lr = 1e-05: no such key; did you mean train.lr? (bad.toml)'),
    ('[train]\ntemperature = 0.7', 'train.temperature = 0.7: no such key; did you mean rollout.temperature? (bad.toml)'),
    ('lr = 1e-5', 'lr = 1e-05: no such key; did you mean train.lr? (bad.toml)'),
    ('[zzz]', f'zzz = {{}}: no such key; there are {SECTIONS} (bad.toml)'),
    ('"a\\nb" = 1', f'a\\nb = 1: no such key; there are {SECTIONS} (bad.toml)'),
    ('[log]\nqqq = 1', 'log.qqq = 1: no such key; there are log.samples, log.trace, log.to, log.stall_s, log.record (bad.toml)'),
    ('train = 3', 'train = 3: is a section, not a key; write train.steps, … (bad.toml)'),
    ('[train.lr]\nx = 1', 'train.lr = {x = 1}: must be a valid number; 1e-06 is the default (bad.toml)'),
    ('[guard]\nmax_skipped = 3', 'guard.max_skipped = 3: is no longer a key; leave it out: its limits are fixed (docs/faults.md) (bad.toml)'),
    ('[train]\nsteps = true', 'train.steps = true: must be a valid integer; 40 is the default (bad.toml)'),
    ('[train]\nsteps = "40"', 'train.steps = "40": must be a valid integer; 40 is the default (bad.toml)'),
    ('[train]\nlr = 2024-01-01', 'train.lr = 2024-01-01: must be a valid number; 1e-06 is the default (bad.toml)'),
    ('[model]\ndtype = 16', 'model.dtype = 16: must be \'float32\' or \'bfloat16\'; "float32" is the default (bad.toml)'),
    ('[train]\nsteps = 0x' + 'f' * 4000, 'train.steps = (huge): must be less than or equal to 10000000; 40 is the default (bad.toml)'),
    ('[train]\nalgorithm = "drgrpo"', f'train.algorithm = "drgrpo": must be {ALGORITHMS}; did you mean "dr_grpo"? (bad.toml)'),
    ('[train]\nobjective = "gpso"', 'train.objective = "gpso": must be one of decoupled, naive, gspo, cispo, or your own "FILE.py:NAME"; did you mean "gspo"? (bad.toml)'),
    ('[train]\nestimator = "adv.py"', 'train.estimator = "adv.py": must be one of grpo, dr_grpo, rloo, reinforce++, batch, gae, or your own "FILE.py:NAME"; grpo is usual (bad.toml)'),
    ('[train]\nshard_optimizer = true', 'train.shard_optimizer = true: is no longer a key; write train.shard = "optimizer" for true, and leave it out for false (bad.toml)'),
    ('[train]\nshard = "full"', 'train.shard = "full": there is one training device; "none" works (bad.toml)'),
    ('[devices]\nshare = true\nrollout = 2\ntensor_parallel = 2', 'devices.rollout = 2: devices.share is for one engine and one rank; 1, or devices.share = false (bad.toml)'),
    ('[devices]\nshare = true\ntrain = 2', 'devices.train = 2: devices.share is for one engine and one rank; 1, or devices.share = false (bad.toml)'),
    ('[devices]\nshare = "yes"', 'devices.share = "yes": must be a valid boolean; false is the default (bad.toml)'),
    ('[model]\npath = "a\\nb"', 'model.path = "a\\nb": must be one line of text; "tiny" is the default (bad.toml)'),
    ('seed = -1', 'seed = -1: must be greater than or equal to 0; 0 is the default (bad.toml)'),
    ('[rollout]\ntemperature = nan', 'rollout.temperature = nan: must be a finite number; 1.0 is the default (bad.toml)'),
    ('[train]\nbatch_size = 30\nnum_minibatches = 4', 'train.batch_size = 30: must be a multiple of train.num_minibatches = 4; 32 is one (bad.toml)'),
    ('[devices]\ntrain = 8\n[rollout]\ngroup_size = 2\n[train]\nbatch_size = 2', 'devices.train = 8: a minibatch has only 4 trajectories; raise train.batch_size (bad.toml)'),
    ('[rollout]\nmax_new_tokens = 20000', 'train.max_tokens = 16384: must hold tasks.max_prompt_tokens + rollout.max_new_tokens = 20256; raise it to 20256'),
    ('[devices]\nrollout = 3\ntensor_parallel = 2', 'devices.rollout = 3: must be a multiple of devices.tensor_parallel = 2; 4 is one (bad.toml)'),
    ('[tasks]\nmax_failures = 7', 'tasks.max_failures = 7: must leave two of rollout.group_size = 8 to compare; at most 6 (bad.toml)'),
    ('[tasks]\noptions = 3', 'tasks.options = 3: must be a table; {} is the default (bad.toml)'),
    ('[tasks.options]\na = [nan]', f'tasks.options = {{a = [nan]}}: \'a\' {OPTION}'),
    ('[tasks.options]\n"a b" = 1', f'tasks.options = {{a b = 1}}: \'a b\' {OPTION}'),
    ('[rollout]\nstop = "####"', 'rollout.stop = "####": must be a list; [] is the default (bad.toml)'),
    ('[rollout]\nstop_tokens = [-1]', 'rollout.stop_tokens = [-1]: each item must be greater than or equal to 0; [] is the default (bad.toml)'),
    ('[tasks]\ntimeout_s = 600', 'log.stall_s = 300.0: must be above tasks.timeout_s = 600.0; a slow reward is no stall: raise it'),
]

# The same for one --set on an empty recipe.
NO_KEY = "sets no key of a recipe; write section.key=value, such as --set train.lr=1e-5"
BAD_SETS = [
    ('train.lr', f'--set = "train.lr": {NO_KEY}'),
    ('extends=x.toml', f'--set = "extends=x.toml": {NO_KEY}'),
    ('train.lr=fast', 'train.lr = "fast": must be a valid number; 1e-06 is the default (--set)'),
    ('seed=1\nfoo=2', 'seed = "1\\nfoo=2": must be a valid integer; 0 is the default (--set)'),
    ('log.to=["tensorbord"]', 'log.to = ["tensorbord"]: must be \'tensorboard\', \'wandb\' or \'trackio\'; did you mean "tensorboard"? (--set)'),
]
