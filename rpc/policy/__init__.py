"""What a worker accepts from others: their pickles, read as data where a policy restricts them."""
