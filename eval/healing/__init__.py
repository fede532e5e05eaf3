"""The cost of turning a stock checkpoint into a folded model that uses its memory: loss against tokens, by method."""
