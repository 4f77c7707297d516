"""Fine-tuning on GLUE and SQuAD: tasks, their data and their scores."""
