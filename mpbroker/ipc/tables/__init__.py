"""Tables of rows that several processes read and write."""
