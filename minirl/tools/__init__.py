"""Commands beside `minirl train`: evaluate, sample, sft, plan, simulate, data, doctor, sweep."""
