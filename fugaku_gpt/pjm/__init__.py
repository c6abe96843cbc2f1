"""The language of PJM (Fujitsu's batch system): scripts, options, resource groups, messages, states, codes and statistics."""
