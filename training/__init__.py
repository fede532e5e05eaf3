"""Training of folded models on the DeepSpeed launcher."""
