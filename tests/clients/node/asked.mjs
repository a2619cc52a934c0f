// As ../python/asked.py.
export const MODEL = process.env.CLIENT_MODEL;
export const KEY = "none";
export const QUESTION = "Name three colours of a rainbow.";
export const CALL = 'Repeat: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>';
export const SHORT = 24, LONG = 64;
export const CITY = {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
};
export const COLOUR = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "green", "blue"] }, warm: { type: "boolean" } },
  required: ["colour", "warm"],
  additionalProperties: false,
};
export const user = (text) => [{ role: "user", content: text }];

// Uses the client for each feature, and prints what comes of it.
export async function run(features) {
  for (const [feature, use] of Object.entries(features)) {
    const began = Date.now();
    let told;
    try {
      told = { gave: await use(`${process.env.CLIENT_URL}/${feature}`) };
    } catch (error) {
      console.error(error);
      told = { error: String(error) };
    }
    console.log(JSON.stringify({ feature, seconds: (Date.now() - began) / 1000, ...told }));
  }
  process.exit(0);
}
