"""Programs that measured or counted the figures of docs/results. A README there names the command of each."""
