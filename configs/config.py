"""The settings of checkpoints in an `ml_collections` config file, beside those of the model.

from ml_collections import config_flags
CONFIG = config_flags.DEFINE_config_file("config")
…
settings = ec.flags.from_config(CONFIG.value.checkpoint)
with settings.manager() as manager:
    runner = settings.runner(job, manager)
    runner.train(ec.LocalSession())
sys.exit(runner.result.exit_code)

python train.py --config=configs/config.py --config.checkpoint.directory=/runs/my_run --config.eval_every=20
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.learning_rate = 1e-3
    config.eval_every = 10

    config.checkpoint = checkpoint = ml_collections.ConfigDict()
    # Whoever runs it says where: --config.checkpoint.directory=…. A placeholder that stays empty means the default.
    checkpoint.directory = config_dict.placeholder(str)
    checkpoint.max_to_keep = 3
    # The epochs that are evaluated stay; the two numbers cannot drift apart.
    checkpoint.keep_period = config.get_ref("eval_every")
    # Whatever has a unit may be a text.
    checkpoint.save_timeout_secs = "5min"
    checkpoint.host_memory_limit_bytes = "8GB"
    # A list of epochs is a tuple, so that --config.checkpoint.save_on_steps='(1,2,5)' works.
    checkpoint.save_on_steps = (1, 2, 5)
    checkpoint.resume = "auto"
    return config
