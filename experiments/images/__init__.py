"""Images: folders and files of them, how they are read and changed, and batches of them."""
