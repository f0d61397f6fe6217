"""Documents from text to packed micro-batches, on top of Hugging Face datasets."""
