"""Fine-tuning: question answering, summarisation and masked-LM adaptation on long documents."""
