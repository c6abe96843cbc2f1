"""Diagnosis of hangs: which rank left the common path, from the flight records of all ranks and the plan of a step."""
