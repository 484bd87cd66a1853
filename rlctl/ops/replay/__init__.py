"""What a run recorded, laid out for people and for other programs: steps, samples, timeline, differences, exports."""
