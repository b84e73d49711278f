"""What a run leaves behind (`folder`, `recorder`), and what it says (`console`)."""
