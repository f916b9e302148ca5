"""What people read: tables and progress on the terminal."""
