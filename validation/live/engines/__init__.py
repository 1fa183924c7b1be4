"""How a real engine is served and recorded: started, loaded, watched."""
