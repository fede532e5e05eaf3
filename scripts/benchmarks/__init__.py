"""Programs that measured or counted the figures of single pages of docs/results, where a README names each command."""
