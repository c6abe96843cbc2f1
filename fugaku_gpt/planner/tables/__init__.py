"""Models of time and memory that are fitted to tables of results, which other trainers measured on other machines."""
