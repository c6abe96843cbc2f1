"""The language of PJM, Fujitsu's batch system: scripts, options, groups, messages, states, codes and statistics."""
