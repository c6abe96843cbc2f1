"""From one sweep file to many runs, and the local scheduler that runs them one at a time."""
