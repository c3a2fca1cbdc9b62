/* streams.h - which streams live as long as the process. Calls no driver.
 *
 * Nobody may touch a stream that was destroyed. An event can be recorded on a stream that lasts
 * whenever somebody needs it; on any other one only now, for whoever may need it later. */
#pragma once

typedef enum {
    FST_STREAM_UNKNOWN,
    FST_STREAM_ENDS, /* as far as is known */
    FST_STREAM_LASTS,
} fst_stream_life;

/* What is known of a stream. A device's default stream (NULL) lasts. */
fst_stream_life fst_gpu_stream_life(const void *stream);

/* Notes of an unknown stream whether it lasts. What was noted stays, and where there is no room for
 * more a stream ends as far as is known. Safe from any thread. */
void fst_gpu_note_stream(const void *stream, int lasts);
