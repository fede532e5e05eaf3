"""Training from recipes, with the Trainer of transformers and the DeepSpeed launcher."""
