"""What people read: tables and progress on the terminal, tables in documents, and a page with figures."""
