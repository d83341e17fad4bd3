"""Everything that learns: batch (stage 5), advantage (6), update (7). It never imports rollout/."""
