"""`minirl eval` and `minirl sample`: what a folder of weights can do, by the rollout path of
training, with no trainer."""
