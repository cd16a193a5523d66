"""When a training goes non-finite: the first bad operation, a guard for the weights, a bundle to repeat the step."""
